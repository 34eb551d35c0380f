"""What a step does because there are several ranks: agree, exchange gradients, norm sharded ones, keep forwards even."""
