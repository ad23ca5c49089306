"""Public attention ops, one module each: softmax attention over ragged and paged keys, and the merging of partial states.

What the three over keys share:

* Query head h reads key head h // (Hq / Hkv).
* Queries are aligned with the tail of their request: of n queries over L keys, query i stands at position L - n + i. With
  ``causal`` it sees no later key; queries at negative positions see none.
* ``sliding_window`` = W lets a query see its own position and the W - 1 before it.
* ``logit_cap`` = c replaces a logit x by c * tanh(x / c). ``sinks`` adds exp(sinks[h]) to head h's denominator and no value.
* The LSE is the natural logarithm of the denominator that the output was divided by, float32. It includes the sink: states of
  one row over parts of its keys merge by their LSEs if exactly one part was given the sink.
* A row that sees no key has output 0 and LSE -inf (with sinks: LSE = the sink, the only term that is left).
* Memory of keys that no row sees is never used in arithmetic: NaN there (unused pages, the tail of a page) does not spread.
"""

from tokenspeed_kernel.ops.attention.decode import mha_decode
from tokenspeed_kernel.ops.attention.extend import mha_extend
from tokenspeed_kernel.ops.attention.merge import merge_states
from tokenspeed_kernel.ops.attention.prefill import mha_prefill

__all__ = ["merge_states", "mha_decode", "mha_extend", "mha_prefill"]
