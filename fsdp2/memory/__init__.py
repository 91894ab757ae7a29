"""Where memory goes: recorded while a run trains, read and drawn afterwards."""
