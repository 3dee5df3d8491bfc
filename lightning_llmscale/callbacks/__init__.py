"""Lightning callbacks that go with the strategies."""
