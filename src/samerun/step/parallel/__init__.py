"""What a step does because there are several ranks: agree, exchange gradients, norm shards, keep forwards even."""
