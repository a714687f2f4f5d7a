"""List what can be asked of a tensor without reading it, and what only renames, casts or slices it."""

import torch

# Questions about the type of a tensor.
ANSWERED = {
    getattr(torch.Tensor, name).__get__
    for name in (
        "shape",
        "dtype",
        "device",
        "layout",
        "ndim",
        "requires_grad",
        "is_cuda",
        "is_cpu",
        "is_meta",
        "is_sparse",
        "is_quantized",
        "is_nested",
        "is_mps",
        "is_xpu",
        "is_mkldnn",
        "is_sparse_csr",
        "itemsize",
        "nbytes",
        "_base",
    )
} | {
    getattr(torch.Tensor, name)
    for name in (
        "size",
        "dim",
        "numel",
        "nelement",
        "stride",
        "ndimension",
        "is_floating_point",
        "is_complex",
        "element_size",
        "is_contiguous",
        "get_device",
        "__len__",
        "storage_offset",
        "is_signed",
        "is_inference",
    )
}
CASTS = {getattr(torch.Tensor, name) for name in ("float", "half", "bfloat16", "double", "to")}
# What only renames, casts or slices: the result is deferred too.
KEPT_LAZY = {
    getattr(torch.Tensor, name)
    for name in (
        "detach",
        "float",
        "half",
        "bfloat16",
        "double",
        "to",
        "type_as",
        "view",
        "reshape",
        "flatten",
        "unsqueeze",
        "squeeze",
        "transpose",
        "permute",
        "contiguous",
        "narrow",
        "select",
        "__getitem__",
        "expand",
    )
}
