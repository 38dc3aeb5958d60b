"""Joins the autopilot to the ranks of a training job: what they observe goes to it, and its
programs come back.

- On the training thread of a rank, `Follower` runs the newest program, and carries the ledger.
- On its background thread, `Observer` writes what the rank has observed into the job's store.
- On rank 0's, `Coordinator` reads that, and passes it on to the autopilot's process.
- In that process, `Planner` decides the next program, which `Coordinator` proposes to all ranks.
"""
