"""What a run can record of its memory and time while it trains. `fsdp2.memory` reads it afterwards."""
