"""How much of what was rejected comes true after all, which is what carried rows can tell (arXiv 2609.14717)."""

from collections.abc import Iterable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from transformers import PreTrainedModel

from hf_carryover.trainer.batch import sample_anchors
from hf_carryover.trainer.guest import GuestTarget
from hf_carryover.trainer.objectives import DraftLoss
from hf_carryover.trainer.packing import PackedCollator, packed_dataset
from hf_carryover.trainer.verification import Verified, after_rejection, verify

LENGTH, ANCHORS = 512, 96


def reconvergence(verified: Verified, said: torch.Tensor) -> torch.Tensor:
    """
    Share of the rejected states q for which the target's best token at q - 1, q or q + 1 is the one that is committed
    at the position that state q predicts (arXiv 2609.14717, section 5).

    Args:
        said (`torch.LongTensor` of shape `(batch, anchors, num_drafted)`):
            The target's choice in place of each draft: the best token of the state before it.

    Returns:
        `torch.Tensor` of shape `(batch, anchors)`, 0 where no state was rejected.
    """
    labels = verified.labels
    committed, known = labels.tokens[..., 1:], labels.supervised[..., 1:]
    count = committed.shape[-1]
    near = torch.stack([F.pad(said, (0, 1), value=-1)[..., shift : shift + count] == committed for shift in range(3)])
    rejected = (torch.arange(count) >= verified.accepted.unsqueeze(-1)) & known
    return (near.any(dim=0) & rejected).sum(dim=-1) / rejected.sum(dim=-1).clamp(min=1)


@torch.no_grad()
def reconverged_share(target: PreTrainedModel, drafter, rows: Iterable[Mapping[str, Any]]) -> dict[str, float]:
    """
    What the states of rejected tokens say, over rounds that start at evenly spread tokens of recorded answers.

    Returns:
        `dict[str, float]`: `rounds` with a rejection; `reconverged`, the mean of [`reconvergence`]; and, of the token
        that is committed behind the first rejected one, how often the target's state of the rejected one knows it
        (`target says`), how often the rejected draft had it (`draft had`), and how often that state knows it and the
        next draft, without carried rows, has another one (`only target`): all that carried rows could add there.
    """
    guest = GuestTarget(target, drafter.config.target_layer_ids)
    head = drafter.borrow(target.get_output_embeddings(), target.device, target.dtype)
    embedding = target.get_input_embeddings()
    loss = DraftLoss(drafter, drafter, embedding, head, "exponential", 1.0, ANCHORS, "cross-entropy", guest)
    counts = torch.zeros(5)
    for sequence in packed_dataset(rows, LENGTH, None):
        recorded, cache = guest.read(PackedCollator()([sequence]), keep_cache=True)
        anchors = sample_anchors(recorded.eligible(), ANCHORS, seeds=None)
        verified = verify(loss, recorded, cache, anchors)
        drafts, accepted, labels = verified.drafts, verified.accepted, verified.labels
        whole = labels.supervised.all(dim=-1) & (accepted < drafts.shape[-1] - 1)
        behind = (accepted + 1).clamp(max=drafts.shape[-1] - 1).unsqueeze(-1)
        said = guest.choice(verified.final)
        near = reconvergence(verified, said)
        committed, said, had = (each.gather(-1, behind)[..., 0] for each in (labels.tokens, said, drafts))
        again = loss.draft(recorded, after_rejection(recorded, anchors, verified)[0])[..., 0]
        right = [said == committed, had == committed, (said == committed) & (again != committed)]
        sums = [whole, near * whole, *(each & whole for each in right)]
        counts += torch.stack([each.sum().float() for each in sums])
    names = ("reconverged", "target says", "draft had", "only target")
    return {"rounds": int(counts[0])} | dict(zip(names, (counts[1:] / counts[0]).tolist(), strict=True))
