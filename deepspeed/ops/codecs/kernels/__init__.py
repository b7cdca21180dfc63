"""The Triton implementations; importing one of these modules needs the package triton."""
