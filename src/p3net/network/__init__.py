"""The network: backbone, density tokens and their decoder, fusion; and the regressors."""
