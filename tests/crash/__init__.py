"""The crash harness: a run of real processes of which one is killed again and again.

`make crash-test ROUNDS=300` kills 300 of each kind of run and then compares what the store holds
with what the agents wrote down themselves. See `docs/store.md`, Tests.
"""
