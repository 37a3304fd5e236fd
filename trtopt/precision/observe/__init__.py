"""What samples tell: the samples, the statistics of tensors, the ranges chosen from them."""
