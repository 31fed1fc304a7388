"""`deltasync demo`: reinforcement learning on Wordle, with a trainer and replicas that share nothing but a store."""
