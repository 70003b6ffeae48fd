"""The gradient of a sum over chunks, with one chunk in memory at a time and nothing computed twice."""

from collections.abc import Callable, Sequence

import torch


class _SumOfChunks(torch.autograd.Function):
    """Takes the gradients of a chunk as soon as its loss is there, so that its activations are free for the next."""

    @staticmethod
    def forward(ctx, losses, count, shared, *parameters):
        leaves = [shared.detach().requires_grad_(), *parameters]
        total, sums = 0.0, [None] * len(leaves)
        for chunk in range(count):
            with torch.enable_grad():
                loss = losses(chunk, leaves[0])
            gradients = torch.autograd.grad(loss, leaves, allow_unused=True)
            sums = [_add(known, new) for known, new in zip(sums, gradients, strict=True)]
            total = total + loss.detach()
        ctx.gradients = sums
        return total

    @staticmethod
    def backward(ctx, scale):
        gradients, ctx.gradients = ctx.gradients, None
        return None, None, *(gradient if gradient is None else gradient * scale for gradient in gradients)


def _add(known: torch.Tensor | None, new: torch.Tensor | None) -> torch.Tensor | None:
    return new if known is None else known if new is None else known.add_(new)


def sum_of_chunks(
    losses: Callable[[int, torch.Tensor], torch.Tensor],
    count: int,
    shared: torch.Tensor,
    parameters: Sequence[torch.nn.Parameter],
) -> torch.Tensor:
    """
    `sum(losses(i, shared) for i in range(count))`, whose gradients are taken chunk by chunk in the forward pass.

    Args:
        losses (`Callable`): From the number of a chunk and `shared` to a scalar.
        count (`int`): Chunks.
        shared (`torch.Tensor`): What all chunks read and what has a gradient of its own to pass on.
        parameters (`Sequence[nn.Parameter]`): What else is learned.

    Returns:
        `torch.Tensor`: A scalar; its `backward` only multiplies, once.
    """
    if count == 1 or not torch.is_grad_enabled():
        return torch.stack([losses(i, shared) for i in range(count)]).sum()
    return _SumOfChunks.apply(losses, count, shared, *(p for p in parameters if p.requires_grad))
