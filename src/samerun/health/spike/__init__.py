"""Loss and gradient-norm spikes: a robust baseline, a threshold calibrated to this run, onset, recovery, drift."""
