"""Operations of text generation: attention over pages, few rows times large weights, packed weights, sampling."""
