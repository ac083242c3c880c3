"""What a figure shows."""


def labels(fig):
    return [text for ax in fig.axes for text in (ax.get_xlabel(), ax.get_ylabel())]


def heights(container):
    return [bar.get_height() for bar in container]
