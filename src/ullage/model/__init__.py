"""The language model: loading, packed and paged forward passes, the chunked head, and the kernels behind them."""
