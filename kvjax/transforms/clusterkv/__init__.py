"""ClusterKV, arXiv 2412.03213: its index of clusters."""
