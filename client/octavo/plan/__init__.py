"""Sizing: what a model's KV takes, where it fits, and how fast it comes back. Needs no torch."""

from octavo.plan.config_file import UnsupportedModel, read_model
from octavo.plan.known_models import KNOWN_MODELS, find_model
from octavo.plan.model import Experts, LatentAttention, ModelShape
from octavo.plan.sizing import Plan, PlanError, PlanRequest, make_plan

__all__ = [
    "KNOWN_MODELS",
    "Experts",
    "LatentAttention",
    "ModelShape",
    "Plan",
    "PlanError",
    "PlanRequest",
    "UnsupportedModel",
    "find_model",
    "make_plan",
    "read_model",
]
