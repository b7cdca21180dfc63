"""What builders load: modules of functions with the published signatures, over the library's operations."""
