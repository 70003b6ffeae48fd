"""The target's rows of a draft vocabulary, got without a look at the weights of its head."""

from collections.abc import Callable

import torch
from torch.nn.functional import linear

Head = Callable[[torch.Tensor], torch.Tensor]


def rows_of(head: Head, ids: torch.LongTensor, width: int, dtype: torch.dtype) -> Head:
    """
    Some outputs of a head. Its rows are got by calling it on unit vectors, which works for wrapped and quantised heads
    too, and are copied once; a head that is not linear is called whole.

    Args:
        head (`Callable`): From `(..., width)` to `(..., vocab)`.
        ids (`torch.LongTensor` of shape `(draft_vocab,)`): On the device of the head's input.
        width (`int`), dtype (`torch.dtype`): Of the head's input.

    Returns:
        `Callable` from `(..., width)` to `(..., draft_vocab)`.
    """
    device = ids.device
    bias = head(torch.zeros(1, width, device=device, dtype=dtype))[0, ids]
    rows = (head(torch.eye(width, device=device, dtype=dtype))[:, ids] - bias).T.contiguous()
    probe = torch.linspace(-1, 1, width, device=device, dtype=dtype)[None]  # not drawn: the seed is the user's
    if torch.allclose(linear(probe, rows, bias), head(probe)[:, ids], rtol=0.1, atol=0.1):
        return lambda hidden: linear(hidden.to(device, dtype), rows, bias)
    return lambda hidden: head(hidden)[..., ids]
