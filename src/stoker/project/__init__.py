"""What `stoker init` makes of a training job of SageMaker, and gates that nothing reports."""
