"""Models: Kunlun, the baselines DIN and DCNv2, and the parts that they are made of."""
