"""The same aggregation as a communication hook of torch's DistributedDataParallel."""
