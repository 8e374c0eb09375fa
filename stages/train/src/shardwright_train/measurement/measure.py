"""Running plans for some steps and reporting the time and memory they took."""

import gc
import os
import statistics
import sys
import time
