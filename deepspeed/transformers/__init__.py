"""Everything that reads or hooks models of Hugging Face Transformers: attention, masks, source code, forwards."""
