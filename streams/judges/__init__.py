"""The program `judge`: asks models about attempts, counts the verdicts of people, and writes the rewards of both.

program     what is read, asked, written and committed
asking      one judgement by a model: votes, answers that cannot be read, endpoints that are down, the budget
endpoint    one request to an OpenAI-compatible server
pending     which trajectories are not judged yet, and what may be committed
book        which judgements and verdicts the log holds
"""
