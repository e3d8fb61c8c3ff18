"""Which plan to measure next: every proposal is a legal plan that was not measured yet (docs/samplers.md)."""

from autotune.search.samplers.baselines import baselines
from autotune.search.samplers.make import SAMPLERS, SamplerName, make_proposer
from autotune.search.samplers.proposer import FIELDS, Observation, Proposer, fields_of

__all__ = ["FIELDS", "SAMPLERS", "Observation", "Proposer", "SamplerName", "baselines", "fields_of", "make_proposer"]
