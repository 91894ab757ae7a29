"""Models that others wrote: of transformers, of timm, of one's own function; and adapters."""
