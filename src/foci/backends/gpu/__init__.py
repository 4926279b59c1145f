"""What GPU backends share: kernels in Triton for every GPU from sm_80 on, and the host code that schedules, compiles and launches kernels.

A library, not a backend: the registry has no row for it, and it imports no backend.
"""
