"""Several draft paths per request: which are verified, where their rows lie, whose blocks they use.

v1/path_runner.py carries them through a step of model runner V1.
"""
