"""What users need to test their own stores and states against deltasync. Not imported by anything else here."""
