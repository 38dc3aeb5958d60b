"""Joins the autopilot to the ranks of a training job: what they observe goes to it, and its
programs come back.

rank, training thread        `ProgramFollower` runs the newest program, and carries the ledger
rank, background thread      `Observer` writes what the rank has observed into the job's store, a
key for each rank rank 0, background thread    `Coordinator` reads these keys, and passes them on to
the autopilot's process autopilot's process          `Planner` decides the next program, which
`Coordinator` proposes to all ranks (`agreement`)
"""
