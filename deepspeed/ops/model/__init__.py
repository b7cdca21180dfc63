"""Operations of transformer models with a backward of their own: norms, rotary embedding, gated products, the loss."""
