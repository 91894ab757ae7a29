import os

# Programs run in forks of a process that has torch imported. One whose libraries have computed on several threads
# leaves its forks without these, and they would wait for them. OpenMP reads this when torch is loaded.
os.environ.setdefault("OMP_NUM_THREADS", "1")
