"""The drafter's keys and values of one generation."""

import torch


class DrafterCache:
    """
    Key/value rows in the order `[committed | carried | looped | block]`, one buffer a layer.

    A forward writes its rows behind the first `length` and sees everything up to them; what it wrote stays only if
    `length` is then moved over it, so the next forward overwrites the rest and nothing is ever copied away. Rows of
    different kinds may share a position, hence visibility by `positions`, never by index.

    Attributes:
        length (`int`): Rows that the next forward finds in place.
    """

    def __init__(self):
        self.length = 0
        self._positions: torch.Tensor | None = None
        self._keys: list[torch.Tensor] = []
        self._values: list[torch.Tensor] = []

    def place(self, positions: torch.Tensor) -> torch.Tensor:
        """
        Note the positions of the rows that the coming `update` calls bring.

        Args:
            positions (`torch.LongTensor` of shape `(batch, new_rows)`): Absolute positions.

        Returns:
            `torch.LongTensor` of shape `(batch, length + new_rows)`: Positions of all rows that queries can see.
        """
        self._positions = self._write(self._positions, positions, dim=1)
        return self._positions[:, : self.length + positions.shape[1]]

    def update(self, keys: torch.Tensor, values: torch.Tensor, layer_idx: int) -> tuple[torch.Tensor, torch.Tensor]:
        """
        Write one layer's new rows behind the first `length`.

        Args:
            keys, values (`torch.Tensor` of shape `(batch, kv_heads, new_rows, head_dim)`): Keys already rotated.
            layer_idx (`int`): Layer; layers come in order.

        Returns:
            Two `torch.Tensor` of shape `(batch, kv_heads, length + new_rows, head_dim)`.
        """
        if layer_idx == len(self._keys):
            self._keys.append(keys.new_empty(0))
            self._values.append(values.new_empty(0))
        self._keys[layer_idx] = self._write(self._keys[layer_idx], keys, dim=2)
        self._values[layer_idx] = self._write(self._values[layer_idx], values, dim=2)
        end = self.length + keys.shape[2]
        return self._keys[layer_idx][:, :, :end], self._values[layer_idx][:, :, :end]

    def _write(self, buffer: torch.Tensor | None, rows: torch.Tensor, dim: int) -> torch.Tensor:
        end = self.length + rows.shape[dim]
        if buffer is None or buffer.numel() == 0 or buffer.shape[dim] < end:
            shape = list(rows.shape)
            shape[dim] = 2 * end
            grown = rows.new_empty(shape)
            if buffer is not None and self.length:
                grown.narrow(dim, 0, self.length).copy_(buffer.narrow(dim, 0, self.length))
            buffer = grown
        buffer.narrow(dim, self.length, rows.shape[dim]).copy_(rows)
        return buffer
