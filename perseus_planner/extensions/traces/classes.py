"""Classes of kernels by their names: what a GPU's time goes into.

The order matters: a name is of the first class whose pattern it has, as names of fused kernels have
words of several.
"""

from __future__ import annotations

import re

COMMUNICATION = "communication"
ATTENTION = "attention"
PRODUCT = "products"
MEMORY = "memory"
OTHER = "unknown"

CLASSES = (PRODUCT, ATTENTION, MEMORY, COMMUNICATION, OTHER)
"""All classes; of kernels of "memory" the memory's bandwidth decides: norms, sums, copies."""

_PATTERNS = (
    # "SendRecv" is a transfer or an all-to-all, and "Generic" of AMD anything: one class.
    (
        COMMUNICATION,
        r"nccl|rccl|all_?reduce|all_?gather|reduce_?scatter|all_?to_?all|cross_device|nvshmem|"
        r"multimem|symm_mem",
    ),
    # Kernels that move keys and values to a cache are copies, and so are those of tables of rows.
    # Names of torch.compile list the operations that were fused, of which products are none.
    (
        MEMORY,
        r"reshape_and_cache|set_kv_buffer|kv_indices|kv_?cache|rotary|rope|split_embedding|"
        r"fbgemm_gpu::(?!.*(?<!fb)gemm)|triton_(poi|red|per)_",
    ),
    (
        ATTENTION,
        r"flash|fmha|attn|attention|paged_?(decode|prefill)|BatchPrefill|BatchDecode|sage|"
        r"bwd_kernel_d[kq]",
    ),
    # What prepares and finishes products: transposes for convolutions, sums of their parts.
    (
        MEMORY,
        r"im2d?2?col|col2im|nchwToNhwc|nhwcToNchw|SubTensorOp|splitKreduce|reduce_?kernel|"
        r"tensorTransform|scatter|gather|^(?!.*gemm).*transpose",
    ),
    (
        PRODUCT,
        r"(?<!fb)gemm|gemv|nvjet|cutlass|xmma|Cijk_|cublas|matmul|[^a-z]mm[_0-9]|bmm|conv|"
        r"triton_tem|winograd|wgrad|dgrad|scudnn|hmma|wmma|miopenSp3|Sp3Asm|fused_?moe|gridwise|"
        r"dot_kernel|rnn|lstm",
    ),
    (
        MEMORY,
        r"elementwise|softmax|norm|reduce|cat|copy|memcpy|memset|fill|embedding|sort|scan|"
        r"dropout|index|pool|upsample|interpolat|Moments|GammaBeta|loss|nll|multi_tensor|adam|"
        r"sgd|optimizer|foreach|cub::|rocprim|thrust|triton_|act_and_mul|silu|gelu|relu|pad|"
        r"permute|masked|where|arange|distribution|random|philox|topk|argmax|unique|radix|hist|"
        r"cumsum|jagged|segment|lookup|quant|bn_(fw|bw)_|Compute[A-Za-z]*(Gradient|Params)|"
        r"bounds_check|scalePacked|layer|vectorized|sampl|tril|triu|flip|roll|cast|unrolled",
    ),
)
_COMPILED = tuple((name, re.compile(pattern, re.IGNORECASE)) for name, pattern in _PATTERNS)


def kernel_class(name: str, category: str = "kernel") -> str:
    """Return the class of a kernel, a copy or a fill.

    Args:
        name: as the profiler has it.
        category: of its event; copies and fills are of their own.
    """
    if "mem" in category.lower():
        return MEMORY
    for found, pattern in _COMPILED:
        if pattern.search(name):
            return found
    return OTHER
