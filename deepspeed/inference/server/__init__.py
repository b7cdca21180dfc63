"""A model over HTTP in OpenAI's format: text and HTTP in one process, each engine in processes of its own."""
