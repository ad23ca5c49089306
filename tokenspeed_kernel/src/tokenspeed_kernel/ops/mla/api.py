"""Public ops of the family, one module each.

What they share:

* A latent row is latent_dim elements, which are key and value at once, and then rope_dim elements, which are key alone. All query
  heads read the same row.
* Queries are aligned with the tail of their request: of n queries over L keys, query i stands at position L - n + i. With
  ``causal`` it sees no later key; queries at negative positions see none.
* The LSE is the natural logarithm of the softmax's denominator, float32. A row that sees no key has output 0 and LSE -inf.
* Memory of keys that no row sees is never used in arithmetic: NaN there (unused pages, the tail of a page) does not spread.
"""

from tokenspeed_kernel.ops.mla.decode import mla_decode
from tokenspeed_kernel.ops.mla.extend import mla_extend
from tokenspeed_kernel.ops.mla.prefill import mla_prefill
from tokenspeed_kernel.ops.mla.rope_write import rope_write_mla
from tokenspeed_kernel.ops.mla.write import write_mla_cache

__all__ = ["mla_decode", "mla_extend", "mla_prefill", "rope_write_mla", "write_mla_cache"]
