"""`SparseTensor`: a sparse gradient as rows and their values, the way ranks exchange it."""

from __future__ import annotations

import torch
from torch import Tensor

from deepspeed.errors import UsageError

__all__ = ["SparseTensor"]


class SparseTensor:
    """Rows of a matrix and their numbers; a row may appear several times, and counts with the sum of its values."""

    indices: Tensor  # [rows]
    values: Tensor  # [rows, …]
    dense_size: list[int]

    def __init__(self, dense_tensor: Tensor | None = None) -> None:
        """Take over a tensor that torch holds sparse; without one, an object whose attributes are set later."""
        self.orig_dense_tensor = dense_tensor
        self.is_sparse = True
        if dense_tensor is None:
            return
        if not dense_tensor.is_sparse or dense_tensor.sparse_dim() != 1:
            raise UsageError(
                f"SparseTensor takes a sparse tensor of rows, such as the gradient of nn.Embedding(sparse=True); found "
                f"shape {tuple(dense_tensor.shape)}, layout {dense_tensor.layout}"
            )
        rows = dense_tensor.coalesce()
        self.indices = rows.indices().flatten()
        self.values = rows.values()
        self.dense_size = list(dense_tensor.shape)

    def to_coo_tensor(self) -> Tensor:
        """As torch's sparse tensor."""
        return torch.sparse_coo_tensor(
            self.indices.unsqueeze(0), self.values, self.dense_size, check_invariants=False
        ).requires_grad_(self.values.requires_grad)

    def to_dense(self) -> Tensor:
        """The whole matrix, with zeros elsewhere."""
        dense = torch.zeros(self.dense_size, dtype=self.values.dtype, device=self.values.device)
        return dense.index_add_(0, self.indices, self.values)

    @staticmethod
    def type() -> str:
        """The name of this kind of tensor."""
        return "deepspeed.SparseTensor"

    def sparse_size(self) -> tuple[int, int]:
        """The numbers that are held, and those of the whole matrix."""
        return self.indices.numel() + self.values.numel(), int(torch.Size(self.dense_size).numel())

    def add(self, b: SparseTensor) -> None:
        """Add a gradient of the same matrix."""
        if b.dense_size != self.dense_size:
            raise UsageError(f"a sparse tensor of {self.dense_size} cannot take one of {b.dense_size}")
        self.indices = torch.cat([self.indices, b.indices])
        self.values = torch.cat([self.values, b.values])

    def __str__(self) -> str:
        held, whole = self.sparse_size()
        return f"{self.type()}(indices_size={list(self.indices.shape)}, values_size={list(self.values.shape)}, " + (
            f"dense_size={self.dense_size}, device={self.values.device}, reduction_factor={whole / max(held, 1):.1f})"
        )

    __repr__ = __str__
