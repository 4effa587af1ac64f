from engine.loop import Loop
from engine import comm

comm.launch()
Loop().fit()
comm.close()
