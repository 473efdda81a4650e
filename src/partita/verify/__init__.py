"""The verifier: shares no code with searches, lowering or the engine, and trusts none of them.

timelines   is this timeline a true run of this program, and can the program run at all?
layouts     does every tensor of a stage lie as its reader needs it, are partial sums reduced?
routing     do dispatches to experts and their combines route the same groups of tokens?
pipelines   what passes between stages, what is inside blocks, how a step ends
"""

from partita.verify.pipelines import check_meaning, verify_meaning
from partita.verify.timelines import check_timeline, verify_program, verify_timeline

__all__ = [
    "check_meaning",
    "check_timeline",
    "verify_meaning",
    "verify_program",
    "verify_timeline",
]
