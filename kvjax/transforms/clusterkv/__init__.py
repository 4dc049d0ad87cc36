"""ClusterKV, arXiv 2412.03213: clusters of keys, their index, and recall of whole clusters."""
