"""Benchmarks against baselines in the same run: what counts is the ratio, since both sides share one machine's day."""
