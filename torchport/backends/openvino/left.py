"""Operators that stay with PyTorch, and why: what the opset lacks, and what the engine would compute otherwise."""

from __future__ import annotations

from typing import Any, Final

__all__ = ["why_left"]

_GROUPS: Final = {
    "OpenVINO factorises no matrices": (
        "_linalg_svd _linalg_eigh linalg_eig linalg_qr geqrf ormqr linalg_householder_product linalg_lu "
        "linalg_lu_factor_ex "
        "linalg_lu_solve lu_unpack linalg_ldl_factor_ex linalg_ldl_solve linalg_cholesky_ex cholesky cholesky_inverse "
        "cholesky_solve _linalg_solve_ex linalg_solve_triangular triangular_solve linalg_lstsq linalg_inv_ex "
        "_linalg_det "
        "_linalg_slogdet linalg_pinv linalg_matrix_exp"
    ),
    "OpenVINO has no complex numbers": (
        "_fft_r2c _fft_c2c _fft_c2r _conj_copy _conj_physical complex polar view_as_complex_copy view_as_complex "
        "view_as_real_copy view_as_real"
    ),
    "random numbers come of 64-bit arithmetic, which OpenVINO does in fewer bits": (
        "uniform rand randn rand_like randn_like randint randint_like normal normal_functional log_normal exponential "
        "cauchy "
        "geometric bernoulli multinomial native_dropout rrelu_with_noise_functional randperm poisson"
    ),
    "the shape of the result, or the number of steps, depends on values": (
        "nonzero nonzero_static masked_select _unique2 unique_consecutive unique_dim repeat_interleave mode _ctc_loss "
        "segment_reduce special_chebyshev_polynomial_t special_chebyshev_polynomial_u special_chebyshev_polynomial_v "
        "special_chebyshev_polynomial_w special_shifted_chebyshev_polynomial_t special_shifted_chebyshev_polynomial_u "
        "special_shifted_chebyshev_polynomial_v special_shifted_chebyshev_polynomial_w special_hermite_polynomial_h "
        "special_hermite_polynomial_he special_laguerre_polynomial_l special_legendre_polynomial_p special_zeta igamma "
        "igammac"
    ),
    "OpenVINO's remainder is inexact, and a quotient that is rounded down needs it": "fmod remainder floor_divide",
    "OpenVINO does not look at the bits of a number": "nextafter frexp hash_tensor",
    "OpenVINO has no histograms": "histc histogram _histogramdd_bin_edges _histogramdd_from_bin_cts",
    "OpenVINO samples no volumes, and images with other weights": "grid_sampler_2d grid_sampler_3d",
    "OpenVINO has no tables of vectors that are summed or rescaled as they are read": (
        "_embedding_bag_forward_only _embedding_bag embedding_renorm"
    ),
    "OpenVINO does not change how much memory a tensor has": "resize resize_as",
}
_REASONS: Final = {name: reason for reason, names in _GROUPS.items() for name in names.split()}


def why_left(op: Any) -> str:
    """The reason why an operator is not translated, in words."""
    name = str(op).removeprefix("aten.").split(".")[0]
    reason = _REASONS.get(name)
    return f"there is no translation: {reason}" if reason else "there is no translation to OpenVINO"
