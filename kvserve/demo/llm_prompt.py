"""The prompt of `kvserve demo-llm`: a text of over 1,000 tokens and what to do with it.

Plain data, the same on every machine: the token ids name the chunks, so a change here is another
prefix. One paragraph a line, and no text twice, so that no two chunks are alike.
"""

from typing import Final

TEXT: Final = (
    "The harbour of Sandvik has two lights. The older one stands on the eastern mole and was built "
    "of granite in a single summer, when the herring had failed and the fishermen needed wages. "
    "The younger one is a steel mast on the western rocks, put up after a coaster with a cargo of "
    "roof tiles missed the entrance in fog and settled on the bar. Between the two lights lies a "
    "gap of ninety metres, and everything that the town eats, burns or sells passes through it.",
    "The keeper of both lights is a woman called Ingrid Dahl. She lives in the brick house behind "
    "the fish market, from whose kitchen she can see the eastern light but not the western one. "
    "Every evening an hour before dusk she walks along the mole with a bag that holds a cloth, a "
    "bottle of spirit, two spare lamps and a notebook. She cleans the lens, tries the spare lamp, "
    "writes down the time, the wind and the height of the water, and waits until the light turns "
    "on by itself. Then she rows across the entrance and does the same on the other side.",
    "People ask her why she still rows. The lamps have been electric for forty years, and a cable "
    "under the water tells the pilot station at once when one of them fails. She answers that the "
    "cable reports whether a lamp is burning, not whether anybody can see it. Salt dries on the "
    "glass, gulls nest on the gallery, and once a sail blew off a yacht and wrapped itself around "
    "the mast. On all of those nights the panel in the pilot station was green.",
    "Her notebooks fill a shelf. The first of them were kept by her grandfather, who wrote with a "
    "carpenter's pencil and used his own signs for the weather: a circle for calm, a hook for a "
    "breeze, a comb for a gale. Her father replaced the signs by numbers, and she has kept to the "
    "numbers, but she copies the sign into the margin when the day deserves it. Three years ago a "
    "student from the university came to photograph every page. He wanted to know how often the "
    "sea had risen above the lower step of the eastern stairs. In the first thirty years it was "
    "four times. In the last thirty it was twenty-six times, and nine of those in one winter.",
    "The council read the student's report and asked an engineer what should be done. She proposed "
    "three things. The first was to raise the mole by one metre, which would cost as much as a "
    "school. The second was to move the fish market to higher ground, which nobody wanted, because "
    "the market is where the harbour meets the street. The third was cheap: to leave the walls as "
    "they are, but to agree in advance on what happens at each height of the water. At the first "
    "mark the boats on the inner quay double their lines. At the second the cold store closes its "
    "flood doors and the ice lorry parks on the hill. At the third the siren sounds and the street "
    "along the quay is cleared. Nobody has to decide anything in the dark.",
    "The council chose the third proposal and painted the marks on the eastern stairs: one yellow, "
    "one orange and one red. Ingrid was asked to read them, since she was there every evening, and "
    "she agreed under one condition. The rule for each colour had to fit on a card that could hang "
    "by the door of every house on the quay, and whoever first saw the water touch a mark, were it "
    "a child, had the right to start what was written on the card. The lawyers did not like it. "
    "The pilots, who are used to acting on what they see, liked it very much.",
    "The first real trial came in the second week of November. The forecast spoke of a strong wind "
    "from the south, which does not trouble Sandvik. But the wind turned west at four o'clock, two "
    "hours before high water, and pushed the sea into the bay. At ten past five a boy who had come "
    "to fish from the stairs saw the yellow mark disappear. He ran to the ice house, because its "
    "door was the nearest one with a card. By half past five every boat had a second line ashore. "
    "The orange mark went at six, and the cold store was shut and dry by a quarter past. The water "
    "stopped a hand's breadth below the red mark, stayed there for twenty minutes, and went out.",
    "Nothing was lost that night but a bicycle and some baskets. The next morning the council met "
    "in the market hall, which smelled of fish and wet rope as on any other day. A member proposed "
    "to thank the keeper. Ingrid said that she had been on the western rocks with a cloth in her "
    "hand and had seen nothing of it; they should thank the boy, and then buy more cards. In her "
    "notebook the day has one line: wind west, nine; water under red; both lights seen from the "
    "other side. In the margin, in pencil, she drew a comb.",
)

QUESTION: Final = (
    "Who keeps the lights of Sandvik, and what does she do every evening? "
    "Answer with what the text says."
)


def user_message() -> str:
    """The text, then the question: what is asked last cannot be answered without the prefix."""
    return "\n\n".join((*TEXT, QUESTION))
