"""One round: draft, verify, commit. Knows drafters through the promise in `modeling_drafter.py` only."""

from .candidates import CarryoverCandidateGenerator
from .mixin import CarryoverGenerationMixin, disable, enable
from .pairing import check_pair, check_target, is_drafter
from .settings import DraftCall, DraftSettings
from .stats import DraftStats

__all__ = [
    "CarryoverCandidateGenerator",
    "CarryoverGenerationMixin",
    "DraftCall",
    "DraftSettings",
    "DraftStats",
    "check_pair",
    "check_target",
    "disable",
    "enable",
    "is_drafter",
]
