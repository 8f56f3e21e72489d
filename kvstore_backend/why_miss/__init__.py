"""Reasons for misses: the queries of ``kvstore why-miss`` and of instances, and their answers.

verdict.py  Verdict: a reason, and a sentence that explains it
setups.py   a comparison of two set-ups, from the manifests of their namespaces
parting.py  where two prompts differ first, and the kind of the difference
prompt.py   a comparison of a prompt with the pool
"""

from kvstore_backend.why_miss.parting import count_common, describe_parting, hide_words
from kvstore_backend.why_miss.prompt import Prompt, explain_prompt, judge_length, locate_message, tell_parting
from kvstore_backend.why_miss.setups import compare_setups
from kvstore_backend.why_miss.verdict import REASONS, Verdict

__all__ = [
    "REASONS",
    "Prompt",
    "Verdict",
    "compare_setups",
    "count_common",
    "describe_parting",
    "explain_prompt",
    "hide_words",
    "judge_length",
    "locate_message",
    "tell_parting",
]
