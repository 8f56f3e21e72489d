"""The instances: who has registered, who is healthy, who may be paired with whom."""
