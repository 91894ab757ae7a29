"""What a stranger's file may decide: one door for each kind of thing that it might reach for."""
