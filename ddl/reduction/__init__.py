"""From the parameters of a model to buckets, and from buckets to averages in the background."""
