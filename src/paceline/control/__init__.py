"""The slow loop, without clock, I/O or Ray: a state machine that decides which response runs where. The live fleet
(fleet/) and the simulator (sim/) drive the same one."""
