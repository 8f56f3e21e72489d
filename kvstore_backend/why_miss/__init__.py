"""Why was it a miss? The questions of ``kvstore why-miss`` and of instances, and their answers.

verdict.py  Verdict: a reason, and a sentence that tells it
setups.py   two set-ups beside each other, by the manifests of their namespaces
parting.py  where two prompts part, and the kind of the difference
prompt.py   a prompt and the pool beside each other
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
