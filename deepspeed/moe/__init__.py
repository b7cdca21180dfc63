"""Mixture of experts: gates, the way of tokens to experts on other ranks, and which ranks hold which experts."""
