"""From FSDP1 to FSDP2. So far: what each of FSDP1's options means in FSDP2."""
